"""Configuration: dataclass schemas (each default exactly once), YAML groups, experiments. No torch, ray or vllm."""
