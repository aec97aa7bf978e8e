"""Model FLOPs by formula, so that utilisation means the same for every kernel."""


def decoder_flops(matrix_parameters: int, attention_width: int, tokens: int, pairs: int) -> float:
    """Return the FLOPs of forward and backward of `tokens` tokens, recomputation not counted.

    Each parameter of a matrix product costs 2 FLOPs forward and 4 backward (the input embedding is a look-up: 0). Each
    query-key pair that the masks allow, summed over the layers in `pairs`, costs two products of width H * E
    (`attention_width`) forward and four backward. Source: PaLM, arXiv:2204.02311, appendix B, with the attended pairs
    in its attention term, so that utilisation cannot exceed 100 %.
    """
    return 6.0 * matrix_parameters * tokens + 12.0 * attention_width * pairs
