"""Reinforcement learning: rollouts, rewards, updates, weight sync.

python scripts/train.py experiment=quickstart
python scripts/train.py experiment=tiny_sort num_steps=20 algo.kl_coef=0.01
python scripts/train.py -m experiment=tiny_sort seed=0,1,2
"""

from conf.launch import launch
from conf.schema import Config


def run(cfg: Config) -> int:
    """The script. What it needs is imported here: a wrong configuration should not wait for PyTorch."""
    from scripts.session import train

    return train(cfg)


if __name__ == "__main__":
    launch(run, doc=__doc__)
