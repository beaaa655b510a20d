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
