"""Question-answer sets as published, made into the prompt files that training and evaluation read."""
