"""Late interaction: logits are MaxSim scores of sets of tokens, s_ij = sum_a max_b q_ia . d_jb.

A producer of blocks of logits, with a gradient of its own. All above it is that of dot products:
the passes, the options of pairs, targets and reductions (`arrays.array_pass`).
"""
