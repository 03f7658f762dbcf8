"""Arithmetic models of every stage kind: their output can be worked out by hand. Tests, tests of faults and scale runs use them. No torch.

With n the index of a token, a row, a frame or a sample:

    token(n)  = (31 * seed + sum of the code points of the last user turn + 7 * n) mod 1000      text "w<token> "
    row(n)[j] = token(n) + j                                                                     float32, `width` wide
    frame(2n + b)[q] = (row(n)[0] + 3 * b + 5 * q) mod 1024                                      b in 0, 1; q in 0..3
    sample s of frame f = ((sum of the frame's codes * (s + 1)) mod 2048 - 1024) / 32768
"""
