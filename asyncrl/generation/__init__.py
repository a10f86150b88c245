"""Engines and the rollout loop: prompts in, groups out."""
