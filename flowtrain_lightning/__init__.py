"""Fast training of vision-language models with PyTorch Lightning."""
