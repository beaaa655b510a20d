"""The choices that configuration keys offer: lower-case members, spelt as in YAML."""

from enum import Enum


class Dtype(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class Schedule(Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class Optimizer(Enum):
    adamw = "adamw"
    cpu_adam = "cpu_adam"
    sgd = "sgd"
    muon = "muon"


class Layout(Enum):
    """How rows become micro-batches: each row whole, rows one behind another, or siblings that share their prompt."""

    padded = "padded"
    packed = "packed"
    shared_prefix = "shared_prefix"


class Recompute(Enum):
    """What the forward pass leaves out, to be computed again in the backward pass: nothing, all but the results of
    matrix products and attention, or everything but each layer's input."""

    none = "none"
    selective = "selective"
    full = "full"


class KlEstimator(Enum):
    k1 = "k1"
    k2 = "k2"
    k3 = "k3"
    k3_ratio = "k3_ratio"


class Advantage(Enum):
    """How advantages are estimated: see docs/algorithms.md and rl/advantages.py."""

    group = "group"
    rloo = "rloo"
    remax = "remax"
    reinforce_pp = "reinforce_pp"
    reinforce_pp_baseline = "reinforce_pp_baseline"
    gae = "gae"
    teacher = "teacher"


class PolicyLoss(Enum):
    """The loss of one token: see docs/algorithms.md and rl/losses.py."""

    clip = "clip"
    gspo = "gspo"
    gmpo = "gmpo"
    cispo = "cispo"
    sapo = "sapo"
    reinforce = "reinforce"
    decoupled = "decoupled"
    divergence = "divergence"


class Aggregation(Enum):
    token_mean = "token_mean"
    sequence_mean = "sequence_mean"
    sequence_sum = "sequence_sum"


class KlPlace(Enum):
    loss = "loss"
    reward = "reward"


class Correction(Enum):
    none = "none"
    truncate = "truncate"
    band = "band"
    mask_token = "mask_token"
    mask_sequence = "mask_sequence"
    mask_geometric = "mask_geometric"


class Truncated(Enum):
    keep = "keep"
    mask = "mask"
    punish = "punish"


class Device(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Template(Enum):
    """chat: the tokenizer's chat template. plain: the text as it is, with the tokenizer's own special tokens."""

    chat = "chat"
    plain = "plain"


class Quantization(Enum):
    """What an engine makes of its weights when it loads them, and of those that are pushed: vLLM's online kinds.

    `fp8`: every linear layer. `int8`: the experts.
    """

    none = "none"
    fp8 = "fp8"
    int8 = "int8"


class Channel(Enum):
    """How pushed weights travel.

    `shm`: memory of one host. `ipc`: memory of the one GPU that a rank and an engine share. `collective`: broadcasts
    over gloo, from host to host. `disk`: a model folder for each version, on a file system that all hosts share.
    """

    shm = "shm"
    ipc = "ipc"
    collective = "collective"
    disk = "disk"


class Isolation(Enum):
    """Where the code of an environment runs.

    `inline`: on the event loop, for what is fast and trusted. `thread`: in threads, which cannot be ended when they
    hang. `process`: in processes, which can. `sandbox`: in processes without network, files and rights.
    """

    inline = "inline"
    thread = "thread"
    process = "process"
    sandbox = "sandbox"
