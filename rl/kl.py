"""The KL coefficient over the run: fixed, or steered towards a target."""


def adapt(kl_coef: float, kl: float, target: float, horizon: int, samples: int) -> float:
    """The next coefficient: Ziegler et al. 2019, section 2.2. Grows when the measured `kl` is above `target`.

    e = clip(kl / target - 1, -0.2, 0.2); kl_coef (1 + e samples / horizon). `kl` per token like `target`, in nats.
    """
    error = max(-0.2, min(0.2, kl / target - 1))
    return kl_coef * (1 + error * samples / horizon)
