"""One model on one device mesh: loading, sharding, micro-batches, chunked log-probs, updates, saving.

Shape letters: `T` tokens of all rows one after the other, `B` rows, `L` padded length, `N` selected tokens,
`H` hidden size, `V` vocabulary.
"""
