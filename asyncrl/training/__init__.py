"""The FSDP2 trainer: groups in, gradients, new weights out."""
