"""Errors that name who failed, in which phase, and what to do; the loop lets them pass, scripts decide."""


class RoleError(RuntimeError):
    """An actor failed. The message names the role, the rank or engine, and the phase."""


class RoleDied(RoleError):
    """The process of an actor is gone."""


class RoleTimeout(RoleError):
    """An actor did not answer within its deadline."""


class CheckpointError(RuntimeError):
    """A checkpoint is missing, broken, or of another architecture."""


class SyncError(RuntimeError):
    """A weight push failed or could not be verified; the engines concerned stay paused."""


class ResourceError(RuntimeError):
    """The cluster lacks what the configuration asks for."""


class RoleOutOfMemory(RoleError):
    """An actor could not allocate the memory that it needed, on its GPU or its host."""


# How the allocators of the host and of a GPU, C++, the kernel and Ray's watch over a node say it.
OUT_OF_MEMORY = (
    "can't allocate memory",
    "Cannot allocate memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "std::bad_alloc",
    "MemoryError",
    "OutOfMemoryError",
    "running low on memory",
    "Cuda failure 2 'out of memory'",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "is less than desired GPU memory utilization",
    "No available memory for the cache blocks",
)
LESS_IN_A_RANK = (
    "lower trainer.micro_batch_tokens, set trainer.recompute=full, raise trainer.zero_stage or cluster.train_ranks, or "
    "set trainer.offload_optimizer=true"
)
LESS_IN_AN_ENGINE = (
    "lower rollout.kv_cache_bytes (on a GPU rollout.gpu_memory_utilization), rollout.max_num_seqs or "
    "rollout.max_model_len, or raise rollout.tp"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out; torch, vLLM and the kernel each have a type of their own for it,
    and some pass its text on in another one.
    """
    return any(text in f"{type(error).__name__}: {error}" for text in OUT_OF_MEMORY)


def reason_of(error: BaseException, who: str) -> str:
    """What went wrong in the actor called `who`, by an exception that came from it.

    Without Ray's traceback, and without its general advice after a death; with what to change when memory ran out.
    """
    cause = getattr(error, "cause", None) or error
    said, died, _ = (str(cause).strip() or repr(cause)).partition("\n\tclass_name")
    advice = LESS_IN_AN_ENGINE if who.startswith("rollout engine") else LESS_IN_A_RANK
    if is_out_of_memory(cause):
        return f"out of memory ({said.splitlines()[0]}); {advice}"
    if died:
        return f"{said} If the system ended it because memory ran out (its kernel log says so): {advice}"
    return said
