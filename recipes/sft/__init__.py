"""Supervised fine-tuning with LoRA and the transformers Trainer: unit conversions in tagged
answers.
"""
