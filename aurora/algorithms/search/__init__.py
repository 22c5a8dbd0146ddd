"""The search of who sits where: slots of GPUs, the changes that they may take, and descents over them."""
