"""Where things lie in shared memory: formulas that take the DSL's integers on the device and Python's in tests.

A *stage* is all that a step of the recurrence needs of a chunk of 16 tokens:

| part | bytes | |
|---|---|---|
| K⁺, Q⁺, Kᵉ high, Kᵉ low | 4096 each | [16 tokens, 128] bf16, rows of 256 bytes, 16-byte units swizzled by the row |
| T, P | 512 each | [16, 16] bf16 as B fragments: a lane's four words together |
| decay | 512 | [128] fp32 in the order of the state's fragments |
| b | 64, of 256 | [16] fp32 in the order of a C fragment's columns |

K⁻'s parts lie where Kᵉ's will. A *patch* is [16 tokens, 16 rows of V] bf16, 32 bytes a token, halves swizzled.
"""

CHUNK, D = 16, 128
ROW_BYTES = 2 * D
OPERAND_BYTES = CHUNK * ROW_BYTES
FRAGMENT_BYTES = CHUNK * CHUNK * 2
K_PLUS, Q_PLUS, K_HIGH, K_LOW = (i * OPERAND_BYTES for i in range(4))
K_MINUS_HIGH, K_MINUS_LOW = K_HIGH, K_LOW
T_AT = 4 * OPERAND_BYTES
P_AT = T_AT + FRAGMENT_BYTES
DECAY_AT = P_AT + FRAGMENT_BYTES
B_AT = DECAY_AT + 4 * D
STAGE_BYTES = B_AT + ROW_BYTES  # operands lie at multiples of a row
PATCH_BYTES = CHUNK * CHUNK * 2

# A team's scratch: q, k, g as they are, sums of squares of both warps, each warp's reciprocal roots, L transposed.
RAW = ("q", "k", "g")
RAW_BYTES = len(RAW) * OPERAND_BYTES
SUMS_AT, ROOTS_AT, L_AT = RAW_BYTES, RAW_BYTES + 256, RAW_BYTES + 512
L_PITCH = 80
SCRATCH_BYTES = L_AT + CHUNK * L_PITCH


def word_of_channels(u, token: int):
    """Byte of channels 2u, 2u + 1 of a token in an operand."""
    return ((u * 4) ^ (token % 8 * 16)) + token * ROW_BYTES


def rows_by_16(lane):
    """Byte of the row that a lane addresses in ldmatrix.x4 for block 0: 16 tokens of the first unit, then of the next.

    As it is, these are an A fragment [token, channel]; transposed, the B fragments [token, channel] of two n-tiles.
    """
    token, unit = lane % 16, lane // 16
    return token * ROW_BYTES + ((unit ^ (token % 8)) * 16)


def rows_by_8(lane):
    """The same for the B fragments [channel, token] of two n-tiles: 8 tokens of two units, then the next 8."""
    token, unit = lane % 8 + lane // 16 * 8, lane // 8 % 2
    return token * ROW_BYTES + ((unit ^ (token % 8)) * 16)


def block_of(address, block: int):
    """The address of the same row in block ``block`` of 16 channels; operands lie at multiples of 256."""
    return address ^ (block * 32)


def patch_row(token, half):
    """Byte of rows 8 · half … + 7 of V of a token in a patch."""
    return token * 32 + ((half ^ (token // 4 % 2)) * 16)


def patch_rows_by_8(lane):
    """Byte that a lane addresses in ldmatrix.x4.trans or stmatrix.x4.trans: the C fragments [V, token] of a patch."""
    return patch_row(lane % 8 + lane // 16 * 8, lane // 8 % 2)


def t_element(i: int, j):
    """Byte of T[i, j] among B fragments [j, i]."""
    return (i % 8 * 4 + j % 8 // 2) * 16 + (i // 8 * 2 + j // 8) * 4 + j % 2 * 2


def decay_pair(u):
    """Byte of the decay of channels 2u, 2u + 1."""
    return u // 8 * 64 + u % 4 * 16 + u // 4 % 2 * 8


def decay_of_block(lane, block: int):
    """Byte of the four decays of a lane's columns in block ``block`` of the state's fragments."""
    return block * 64 + lane % 4 * 16


def b_element(token):
    """Byte of the b of a token; those of a lane's columns in C fragments [V, token] are the four from lane % 4 · 16."""
    return token % 8 // 2 * 16 + token // 8 * 8 + token % 2 * 4
