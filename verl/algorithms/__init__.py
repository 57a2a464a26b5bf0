"""Pure maths on tensors: advantages, policy losses, KL, entropy, the anchor. Imports torch and nothing else of ours.

Shape letters: `T` tokens of all rows one after the other (or any selection of them), `B` rows, `V` vocabulary.
"""
