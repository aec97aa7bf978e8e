"""Model FLOPs by formula, so that utilisation means the same for every kernel."""


def decoder_flops_per_token(matrix_parameters: int, num_layers: int, attention_width: int, seq_len: int) -> float:
    """Return the FLOPs of forward and backward per token, recomputation not counted.

    Each parameter of a matrix product costs 2 FLOPs forward and 4 backward (the input embedding is a look-up: 0).
    Causal attention sees (S + 1) / 2 keys per query on average, and two products of width H * E (`attention_width`)
    forward, four backward: 6 * layers * H * E * (S + 1). Source: PaLM, arXiv:2204.02311, appendix B, with the causal
    half of its attention term, so that utilisation cannot exceed 100 %.
    """
    return 6.0 * matrix_parameters + 6.0 * num_layers * attention_width * (seq_len + 1)
