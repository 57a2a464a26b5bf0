"""Rules about several settings at once: what is refused, what is warned about, what follows from them."""
