"""A rank of the policy, or of a frozen model of its kind: reference and teacher."""

import json
from pathlib import Path

import torch

from actors import checkpoint
from actors.engine import Engine, OptimizerSpec
from actors.forward import Scorer, TopScorer
from actors.lora import adapters_off, add_adapters, write_adapter
from actors.rank import Micro, Rank, Update, UpdateResult
from actors.shards import Snapshot, held_regions, sources_of, take_snapshot
from actors.weights import full_shapes, gathered, trained_shapes
from conf.choices import Channel, Layout
from rl import losses
from rl.faults import SyncError
from rl.masking import masked_fill_zero
from rl.metrics import merge_sums, on_cpu
from rl.numerics import current_tokens, mismatch_sums, require_match
from rl.types import Batch, Scores, Sums
from weightsync.channels.channel import Outlet
from weightsync.channels.collective import Broadcaster, GroupAddress, serve
from weightsync.channels.disk import FolderAddress, FolderWriter
from weightsync.channels.ipc import DeviceRing
from weightsync.channels.shm import Ring
from weightsync.folder import in_groups
from weightsync.plan import Item, Link, Turn, Wanted, two_drivers
from weightsync.planner import RankPlan, join_readers, plan_rank, streams_of
from weightsync.saved_plan import Key, load_plan
from weightsync.sender import NUM_SLOTS, Read, Sender
from weightsync.sides import VERSIONS_KEPT

SCORES = ("logprobs", "entropy", "divergence")  # what a forward of actors.forward.Scorer gives, in its order


PROBE_CHUNKS = 4  # of its logits, which would else be most of what a push needs besides its buckets


class PolicyRank(Rank):
    """One rank of the policy: scoring, updates, weights for the sync; of a frozen model: scoring."""

    _sender: Sender | None = None
    _planned: tuple[Key, RankPlan] | None = None  # what it was planned for, and the plan
    _connection = ""  # the name of that for which the sender plans
    _probe_row: tuple[int, ...] = ()
    _probe_logprobs: list[float] | None = None  # of the row, under the weights as they are

    def start(self, model_path: str, address: str, port: int, spec: OptimizerSpec | None, num_threads: int) -> None:
        """Joins the group and loads the model. Collective: every rank of the group must be starting.

        Without `spec` the model is frozen: no process group, no optimizer, a whole copy on each rank.
        """
        self.join(address, port, num_threads, trains=spec is not None)
        self._probe_logprobs = None
        self._snapshots: dict[int, Snapshot] = {}  # by version
        cfg = self.cfg
        lm = self.load_lm(model_path)
        scale = None
        if spec is not None and self.role == "policy" and cfg.lora.rank > 0:
            add_adapters(lm, cfg.lora)
            lm.to(device=self.device, dtype=getattr(torch, cfg.trainer.dtype.value))
            scale = cfg.lora.scale
        scorer = Scorer(lm, cfg.rollout.temperature, cfg.trainer.layout, self.sequence, cfg.trainer.fused_logprobs)
        self.score: Scorer | Engine
        self.score = scorer.requires_grad_(False) if spec is None else self.wrap(scorer, spec, lm, scale)

    def model(self) -> torch.nn.Module | Engine | None:
        """As Rank."""
        return getattr(self, "score", None)

    @torch.no_grad()
    def logprobs(self, micros: list[Micro]) -> list[torch.Tensor]:
        """Log-probabilities [B, T] of each micro-batch (dummies left out), on the CPU."""
        out = []
        for micro in micros:
            values, *_ = self.score(self.on_device(micro.batch), micro.num_chunks)
            if micro.batch is not None:
                out.append(values.float().cpu())
        self.release()
        return out

    def logprobs_and_routes(self, micros: list[Micro]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """As `logprobs`, each with the experts that its tokens took [B, T, layers, k] int16."""
        out = []
        for micro in micros:
            values = self.logprobs([micro])  # none for a dummy, whose forward keeps collectives in step
            if micro.batch is not None:
                out.append((values[0], self.routing.recorded(micro.batch.attention_mask)))
        return out

    def base_logprobs(self, micros: list[Micro]) -> list[torch.Tensor]:
        """As `logprobs`, of the policy without its adapters."""
        with adapters_off(self.engine.module):
            return self.logprobs(micros)

    @torch.no_grad()
    def top_logprobs(self, micros: list[Micro], top_k: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Ids and log-probabilities [B, T, k] of the likeliest tokens at each action token's place, on the CPU.

        k is `top_k`, or the policy's whole vocabulary when that is 0 or larger.
        """
        assert isinstance(self.score, Scorer)
        policy = json.loads((Path(self.cfg.model.path) / "config.json").read_text())
        vocabulary = min(policy["vocab_size"], self.score.lm.get_output_embeddings().weight.shape[0])
        chosen = min(top_k or vocabulary, vocabulary)
        scorer = TopScorer(self.score, chosen, vocabulary)
        return [scorer(self.on_device(m.batch), m.num_chunks) for m in micros if m.batch is not None]

    def reload(self, model_path: str) -> None:
        """Takes the weights of another folder of the same architecture (a frozen rank)."""
        assert isinstance(self.score, Scorer)
        self.score.lm.load_state_dict(self.load_lm(model_path).state_dict())

    def update(self, updates: list[Update]) -> UpdateResult:
        """Optimizer steps, one for each entry.

        Raises rl.numerics.MismatchError on all ranks, before the optimizer moves, when `mismatch_limit` is exceeded.
        """
        result = super().update(updates)
        self._probe_logprobs = None
        if self._probe_row:
            self.probe(list(self._probe_row))  # now, so that the push that follows need not wait for it
        return result

    def accumulate(self, update: Update) -> Sums:
        """As Rank; checks the mismatch when this forward is the scoring of the batch."""
        self.routing.take()  # of scoring
        parts = []
        checked = torch.zeros(2, dtype=torch.float64)  # sum of |engine - trainer|, and of how many tokens
        for micro in update.micros:
            batch = self.on_device(micro.batch)
            scores = Scores(**dict(zip(SCORES, self.engine(batch, micro.num_chunks), strict=False)))
            loss, tensors = losses.policy_objective(self.cfg.algo, batch, scores, update.version)
            self.engine.backward(loss, update.num_action_tokens)
            parts.append(on_cpu(tensors) | self.routing.take())
            if update.mismatch_limit is not None:
                mask = current_tokens(batch, update.version, self.cfg.max_lag)
                gap = mismatch_sums(scores.logprobs.detach(), batch.rollout_logprobs, mask)["mismatch"]
                checked += torch.stack([gap.double(), mask.sum()]).cpu()
        if update.mismatch_limit is not None:
            total = checked.to(self.device)
            if self.world > 1:
                torch.distributed.all_reduce(total)  # ranks of a replica found the same sums: the mean stays
            if total[1] > 0:
                require_match(float(total[0] / total[1]), update.mismatch_limit, update.version)
        return merge_sums(parts)

    def sft(self, updates: list[Update]) -> list[dict[str, float]]:
        """Supervised steps: minus the mean log-probability of the action tokens."""
        self._probe_logprobs = None
        out = []
        for update in updates:
            total = 0.0
            for micro in update.micros:
                batch = self.on_device(micro.batch)
                logprobs, *_ = self.engine(batch, micro.num_chunks, 1.0, Layout.padded)
                loss = -masked_fill_zero(logprobs, batch.action_mask).sum()
                self.engine.backward(loss, update.num_action_tokens)
                total += float(loss.detach())
            result = self.engine.step(update.lr)
            out.append({"loss": total, "grad_norm": result.grad_norm, "skipped_steps": float(result.skipped)})
        return out

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor that a push carries."""
        return full_shapes(self.engine)

    def serve_sync(self, host: str) -> int:
        """Opens a store on `host`, where rank 0 is, for the groups of ranks and engines to meet in; rank 0's port."""
        if self.rank > 0:
            return 0
        self._store = serve(host, self.cfg.sync_patience_s)
        return int(self._store.port)

    def plan_sync(self, readers: list[Wanted], sizes: list[int], host: str, port: int, name: str) -> Link:
        """Plans what this rank sends in each push over the connection `name`. `sizes`: workers of each reader.
        Collective.

        `host`, `port`: where groups meet, if the channel has any.
        """
        sync = self.cfg.sync
        streams = streams_of(self._plan(readers), readers)
        self.close_sync()
        slot_bytes = max((stream.max_bytes for stream in streams), default=1)
        outlet: Outlet
        if sync.channel is Channel.shm:
            outlet = Ring(slot_bytes, NUM_SLOTS)
        elif sync.channel is Channel.ipc:
            outlet = DeviceRing(slot_bytes, NUM_SLOTS)
        elif sync.channel is Channel.collective:
            address = GroupAddress(
                host=host,
                port=port,
                name=f"{name}-{self.rank}",
                slot_bytes=slot_bytes,
                sizes=tuple(sizes),
                readers=tuple(stream.reader for stream in streams),
                meet_s=self.cfg.sync_patience_s,
                timeout_s=sync.timeout_s,
            )
            outlet = Broadcaster(address, NUM_SLOTS)
        else:
            (folder,) = readers
            place = FolderAddress(
                root=str(sync.folder),
                name=name,
                slot_bytes=slot_bytes,
                buffers=folder.buffers,
                shapes=tuple(self.shapes().values()),
            )
            model = Path(self.cfg.model.path)
            beside = [model / file for file in checkpoint.MODEL_FILES if (model / file).exists()]
            outlet = FolderWriter(place, self.rank, NUM_SLOTS, beside)
        self._sender, self._connection = Sender(self.rank, streams, readers, outlet), name
        signed = tuple(stream.fingerprint() for stream in streams)
        return Link(rank=self.rank, streams=streams, signed=signed, address=outlet.address)

    def _plan(self, readers: list[Wanted]) -> RankPlan:
        """What this rank sends to these readers: as it planned last, as the plan of sync.plan says, or planned anew.

        Raises weightsync.plan.PlanError when sync.plan is for other layouts than the run begins with.
        """
        sync, held, joined = self.cfg.sync, held_regions(self.engine, self.world), join_readers(readers)
        key = Key.of([held], joined, sync.slot_bytes)
        if self._planned is None and sync.plan is not None:
            found = load_plan(Path(sync.plan), self.rank, self.world, held, joined, sync.slot_bytes)
            self._planned = key, found
        elif self._planned is None or self._planned[0] != key:
            self._planned = key, plan_rank(held, joined, sync.slot_bytes)
        return self._planned[1]

    def close_sync(self) -> None:
        """Lets go of the channel."""
        if self._sender is not None:
            self._sender.outlet.close()
        self._sender = None

    def close(self) -> None:
        """As Rank."""
        self.close_sync()
        super().close()

    def connect_sync(self) -> None:
        """Meets the engines, which must be connecting too."""
        assert self._sender is not None
        self._sender.outlet.connect()

    @torch.no_grad()
    def take_snapshot(self, version: int) -> None:
        """Copies the live weights, as those of `version`. Collective at ZeRO-3 with adapters."""
        room = self._snapshots.pop(version, None)
        if room is None and len(self._snapshots) == VERSIONS_KEPT:
            room = self._snapshots.pop(min(self._snapshots))
        self._snapshots[version] = take_snapshot(self.engine, room)

    @torch.no_grad()
    def changed_modules(self, version: int) -> list[str]:
        """The engines' modules of which this rank has something that it has not sent. Collective at ZeRO-3 with
        adapters.
        """
        assert self._sender is not None
        return self._sender.changed(self._sources(version))

    @torch.no_grad()
    def begin_push(self, name: str, version: int, modules: list[str] | None) -> None:
        """A push of these modules begins, over the connection `name`. Collective at ZeRO-3 with adapters.

        Raises SyncError when the ranks have planned for another connection since.
        """
        self._sender_of(name).begin(self._sources(version), version, modules)

    def _sender_of(self, name: str) -> Sender:
        """The sender, if it plans for the connection of this name."""
        if self._sender is None or name != self._connection:
            raise SyncError(two_drivers("planned with these ranks", self._connection, name))
        return self._sender

    def _sources(self, version: int) -> list[Read]:
        """How to read what this rank holds of a version: the live weights, or with sync.snapshot their copy."""
        return self._snapshots[version].reads if self.cfg.sync.snapshot else sources_of(self.engine)

    @torch.no_grad()
    def pack(self, name: str, turns: list[Turn | None]) -> Item | None:
        """Sends this rank's bucket of a round; `turns` has that of each rank, or None. Raises SyncError as
        `begin_push`."""
        sender, turn = self._sender_of(name), turns[self.rank]
        return None if turn is None else sender.pack(turn)

    def end_push(self, version: int) -> None:
        """Every engine that is left has everything."""
        assert self._sender is not None
        self._sender.outlet.end(version)

    @torch.no_grad()
    def probe(self, row: list[int]) -> list[float]:
        """Log-probabilities at temperature 1 of each token of `row` but the first. Collective under ZeRO-3."""
        if self._probe_logprobs is None or tuple(row) != self._probe_row:
            logprobs, *_ = self.engine(self.on_device(probe_batch(row)), PROBE_CHUNKS, 1.0, Layout.padded)
            self._probe_row, self._probe_logprobs = tuple(row), [float(x) for x in logprobs[0, 1:].cpu()]
            self.release()
        return self._probe_logprobs

    def export(self, folder: str, model_path: str) -> None:
        """Writes the live weights as a Hugging Face folder (rank 0). Collective under ZeRO-3."""
        weights: dict[str, torch.Tensor] = {}
        item = getattr(torch, self.cfg.trainer.dtype.value).itemsize
        for names in in_groups(full_shapes(self.engine), item, self.cfg.sync.bucket_bytes):
            with gathered(self.engine, names) as tensors:
                if self.rank == 0:
                    weights |= {name: tensor.cpu().clone() for name, tensor in tensors.items()}
        if self.rank == 0:
            checkpoint.write_hf(weights, Path(model_path), Path(folder))

    def export_adapter(self, folder: str, model_path: str) -> None:
        """Writes the adapters alone, for use on top of the model at `model_path` (rank 0). Collective under ZeRO-3."""
        names = list(trained_shapes(self.engine))
        with gathered(self.engine, names) as tensors:
            if self.rank == 0:
                adapters = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
                write_adapter(adapters, self.cfg.lora, model_path, Path(folder))

    def load(self, folder: str) -> None:
        """As Rank."""
        self._probe_logprobs = None
        super().load(folder)


def probe_batch(row: list[int]) -> Batch:
    """One row in which every token but the first is an action token."""
    count = len(row)
    return Batch(
        tokens=torch.tensor([row]),
        attention_mask=torch.ones(1, count, dtype=torch.bool),
        action_mask=torch.tensor([[False] + [True] * (count - 1)]),
        rollout_logprobs=torch.zeros(1, count),
        rewards=torch.zeros(1),
        group_index=torch.zeros(1, dtype=torch.long),
        episode_index=torch.zeros(1, dtype=torch.long),
        prefix_index=torch.zeros(1, dtype=torch.long),
        prompt_len=torch.ones(1, dtype=torch.long),
        version=torch.zeros(1, dtype=torch.long),
        truncated=torch.zeros(1, dtype=torch.bool),
    )
