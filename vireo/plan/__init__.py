"""What a training run will cost, before it runs: the work of a step, its memory, its seconds."""
