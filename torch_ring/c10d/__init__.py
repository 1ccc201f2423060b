"""torch.distributed's backend ``ring``: ``init_process_group("ring")``."""
