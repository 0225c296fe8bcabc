"""Safetensors checkpoints: opening, auditing, reading parameter by parameter, and synthesising."""
