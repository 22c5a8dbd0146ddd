"""Many processes as one: starting them, finding each other, moving tensors between them."""
