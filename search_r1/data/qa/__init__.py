"""Question-answer sets as published, converted to the prompt files that training and evaluation read."""
