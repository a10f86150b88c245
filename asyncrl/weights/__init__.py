"""Weights from trainer to generators: a plan, a sender, a receiver."""
