"""Rewards that environments are made of; importing this package imports nothing heavy."""
