"""Reinforcement learning: rollouts, rewards, updates, weight sync.

python scripts/train.py experiment=quickstart
python scripts/train.py experiment=tiny_sort num_steps=20 trainer=zero2 cluster.train_ranks=2
python scripts/train.py model=hf model.path=/models/mine data=file data.path=sums.jsonl reward.shuffle=true
python scripts/train.py -m experiment=tiny_sort trainer.lr=1e-4,3e-4 'seed=range(3)'
python scripts/train.py experiment=quickstart --cfg job
"""

from conf.launch import launch
from conf.schema import Config


def run(cfg: Config) -> int:
    """The script. What it needs is imported here: a wrong configuration should not wait for PyTorch."""
    from scripts.session import train

    return train(cfg)


if __name__ == "__main__":
    launch(run, doc=__doc__)
