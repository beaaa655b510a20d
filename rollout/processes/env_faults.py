"""How a call of an environment fails, by what is to be made of it. Imports nothing."""


class EnvFault(Exception):
    """Any of those below. Each can be pickled."""


class EnvRaised(EnvFault):
    """The environment raised; `traceback` is its text. is_infrastructure: it was an EnvironmentFailure."""

    def __init__(self, traceback: str, is_infrastructure: bool) -> None:
        super().__init__(traceback, is_infrastructure)
        self.traceback = traceback
        self.is_infrastructure = is_infrastructure

    def __str__(self) -> str:
        return self.traceback


class EnvTimeout(EnvFault):
    """No answer by the deadline. stage: the method that was called, or "start" of its process."""

    def __init__(self, stage: str, deadline_s: float) -> None:
        super().__init__(stage, deadline_s)
        self.stage = stage
        self.deadline_s = deadline_s

    def __str__(self) -> str:
        return f"the environment did not answer {self.stage} within {self.deadline_s:g} s"


class EnvDied(EnvFault):
    """The process of the environment is gone; `how` says by which signal, exit code or limit."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


class EnvBadValue(EnvFault):
    """A method returned what it must not: which, what was wanted and what was found."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what
