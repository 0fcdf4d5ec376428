"""Adapters of checkpoints: LoRA as PEFT saves it."""
