"""Evaluates a checkpoint or a Hugging Face folder on held-out prompts; no training, no weight sync.

    python scripts/eval.py experiment=quickstart model.path=models/smollm2
    python scripts/eval.py experiment=quickstart resume=runs/2026-01-01-quickstart        # its newest checkpoint
    python scripts/eval.py experiment=quickstart resume=.../checkpoints/step_000010 evaluation.samples=8

`resume` names a checkpoint (or a run folder); otherwise `model.path` is evaluated. Writes evaluation.json (mean and
pass@k with 95 % confidence intervals) into the run folder, and prints it.
"""

import dataclasses
import json
from contextlib import ExitStack
from pathlib import Path

from conf.launch import launch, to_dict
from conf.schema import Config
from rl.prompts import PromptStream
from rl.run_folder import resolve_run_dir, write_json


def run(cfg: Config) -> int:
    """The script."""
    from actors.checkpoint import export_hf
    from actors.cluster import Cluster, detect_device
    from actors.resume import as_checkpoint
    from rollout.engines import EngineGroup
    from rollout.evaluate import evaluate
    from rollout.pool import RolloutPool
    from rollout.preflight.launch import prepare, require_engine_device
    from scripts.wiring import make_player

    cfg = dataclasses.replace(cfg, evaluation=dataclasses.replace(cfg.evaluation, every=1))
    checkpoint = as_checkpoint(Path(cfg.resume)) if cfg.resume not in ("auto", "never") else None
    prepared = prepare(cfg)
    require_engine_device(cfg.rollout, detect_device(cfg.cluster))
    run_dir = resolve_run_dir(f"{cfg.name}-eval", cfg.run_dir, "never")
    with ExitStack() as stack:
        cluster = Cluster(cfg.cluster)
        stack.callback(cluster.stop)
        stack.callback(cluster.save_logs, run_dir / "logs")
        model_path = str(export_hf(checkpoint, cluster.folder / "hf")) if checkpoint else cfg.model.path
        engines = EngineGroup(cfg, cluster, model_path)
        stack.callback(engines.stop)
        engines.start().result()
        engines.accept_loaded(version=0)
        player = make_player(cfg, prepared, stack)
        stream = PromptStream(prompts=prepared.train, seed=cfg.seed, shuffle=cfg.data.shuffle)
        pool = RolloutPool(cfg, engines.handles, stream, player, prepared.stop_token_ids)
        stack.callback(pool.close)
        result = evaluate(cfg, pool, prepared.held_out, prepared.stop_token_ids)
    source = str(checkpoint or cfg.model.path)
    write_json(run_dir / "evaluation.json", {"source": source, **result, "config": to_dict(cfg)})
    print(json.dumps({"source": source, **result}, indent=2))
    print(f"wrote {run_dir / 'evaluation.json'}")
    return 0


if __name__ == "__main__":
    launch(run, doc=__doc__)
