"""Where threads that share the elements of few rows must wait for each other.

Threads share out the elements of a loop over a row, and the columns of a product. Where the shares of two accesses are
the same, no thread has to wait: a gate's product and the pointwise work on it need no barrier in between.

    thread 0          | thread 1
    columns 0..H/2    | columns H/2..H of each gate      product: reads the whole state, writes its own columns
    elements 0..H/2   | elements H/2..H                  gates: read and write the same share, no barrier
    ------------------- barrier -------------------      the next product reads all elements again
"""

from typing import Final, final

from stretto.kernels.hazards import Accesses, Hazards, Owner
from stretto.kernels.ir import Affine, Product, Weight, Where
from stretto.kernels.schedule import Group, Item, Schedule, loads_in

WHOLE_PANELS: Final = 32
"""Elements of a panel of the widest vectors: sizes that are multiples are shared out in panels on any machine."""


@final
class Barriers:
    """Finds barriers for the groups of a step, which come in order.

    Attributes:
        blocks: Elements of the blocks, such as gates, that a product's result is read in; all if it is read whole.
    """

    def __init__(self, schedule: Schedule) -> None:
        groups = schedule.groups
        products = [group.items[0] for group in groups if group.kind == "product"]
        self.loads = [
            (group, load)
            for group in groups
            if group.kind != "product"
            for item in group.items
            for load in loads_in(item.expression)
        ]
        self.operands = {load.buffer for item in products for load in loads_in(item.expression)}
        self.blocks: dict[Weight, int] = {}
        for item in products:
            assert isinstance(item.value, Product)
            weight, block = item.value.weight, self._block(item, item.value)
            self.blocks[weight] = weight.N if self.blocks.get(weight, block) != block else block
        self._hazards = Hazards()

    def _block(self, item: Item, product: Product) -> int:
        columns = product.weight.N
        if item.buffer in self.operands or sum(size != 1 for size in product.dims) > 1:
            return columns
        sizes = set()
        for group, load in self.loads:
            if load.buffer is item.buffer:
                moved = None if load.anywhere else _moved(group.dims, load.address)
                if moved is None or columns % moved[0] or moved[1] or moved[0] % WHOLE_PANELS:
                    return columns
                sizes.add(moved[0])
        return sizes.pop() if len(sizes) == 1 else columns

    def must_wait(self, group: Group) -> bool:
        """Whether the group reads or overwrites what another thread made or reads since the last barrier."""
        return self._hazards.must_wait(self._accesses(group))

    def must_wait_at_end(self) -> bool:
        """Whether the first groups of the next step must wait for the last ones of this."""
        return self._hazards.must_wait_at_end()

    def _accesses(self, group: Group) -> Accesses:
        if group.kind == "product":
            (item,) = group.items
            assert isinstance(item.value, Product)
            block = self.blocks[item.value.weight]
            owner: Owner = (block, 0) if block % WHOLE_PANELS == 0 else "panels"
            if item.value.weight.heads > 1:
                owner = "heads"
            reads: list[tuple[str, Owner]] = [(load.buffer.name, None) for load in loads_in(item.expression)]
            return Accesses(reads, writes=[(item.buffer.name, owner)])
        found = Accesses()
        for item in group.items:
            for load in loads_in(item.expression):
                if load.buffer.where is not Where.PRIVATE:
                    owner = None if load.anywhere else _owner(group, load.address)
                    found.reads.append((load.buffer.name, owner))
            if item.buffer.where is not Where.PRIVATE:
                found.writes.append((item.buffer.name, _owner(group, item.target)))
        return found


def _moved(dims: tuple[int, ...], place: Affine) -> tuple[int, int] | None:
    """Elements that a loop of one dimension passes over one by one, and how far off a multiple of them it begins."""
    long = [d for d, size in enumerate(dims) if size != 1]
    if len(long) != 1 or dims[long[0]] == 0 or place.factors[long[0]] != 1:
        return None
    size = dims[long[0]]
    return size, place.constant % size


def _owner(group: Group, place: Affine) -> Owner:
    if group.kind == "reduce":
        return None
    if sum(size != 1 for size in group.dims) > 1:
        # Such a loop may be written as one over all elements at once, which threads share, or as the first thread's.
        return None
    if all(size == 1 for size in group.dims):
        return "last"
    return _moved(group.dims, place)
