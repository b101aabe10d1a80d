"""In which order are freed blocks used again?

A request gives its blocks back in reverse table order, so that the tail of a sequence is evicted before the beginning
that others may share. Of these, blocks without a hash (nobody can find them) go to the very front of the free queue,
as one batch that keeps its order; blocks with a hash join the back. Write the queue after one request has been freed.
`queue` is the free queue, head first; `table` the block table of a request that nobody shares blocks with.
"""

HINTS = (
    "Table [4, 5, 6] with only 6 unhashed: 6 to the front, then 5 and 4 to the back, in that order.",
    "If 5 and 6 are both unhashed the queue begins 6, 5: the table's last block becomes the head.",
)


def free(queue: list[int], table: list[int], hashed: set[int]) -> list[int]:
    raise NotImplementedError
