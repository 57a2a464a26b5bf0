"""What a step reports: of its batch, of sampler against trainer, of its speed."""
