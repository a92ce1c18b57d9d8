"""wgmma: products that run in order, some time between their issue and the wait that covers them."""

from torch import Tensor

from tests.executor.memory import Access, Buffer
from tests.executor.schedule import Fault, Work, block
from tests.executor.values import TORCH, Value


class Product:
    """One in flight: what it reads from shared memory, and its result once it has run."""

    def __init__(self, accesses: list[Access]):
        self.accesses, self.result, self.work = accesses, None, None

    @property
    def access(self) -> Access | str:
        return self.accesses[0]


class Accumulator(Value):
    """The result of a product that nobody has waited for: other products may add to it, and nothing else may touch it."""

    __slots__ = ("product",)

    def __init__(self, product: Product, layout: object):
        super().__init__(None, layout)
        self.product = product

    @property
    def tensor(self) -> Tensor:
        raise Fault(f"{block().running.line()}: uses an accumulator before warpgroup_mma_wait has returned it")


def multiply(a: Value | Buffer, b: Buffer, acc: Value, use_acc: bool = True, is_async: bool = False) -> Value:
    """acc + a b, or a b: [M, K] @ [K, N], operands of 16 bits and sums in fp32."""
    role = block().pause()
    assert a.dtype == b.dtype and TORCH[a.dtype].itemsize == 2, f"operands of {a.dtype} and {b.dtype}"
    product = Product([operand.touch(role, "product") for operand in (a, b) if isinstance(operand, Buffer)])
    in_registers = a.take_tensor() if isinstance(a, Value) else None
    before = acc.product if isinstance(acc, Accumulator) else acc.take_tensor()

    def run() -> None:
        left = a.view if in_registers is None else in_registers
        product.result = left.float() @ b.view.float()
        if use_acc:
            product.result += before.result if isinstance(before, Product) else before

    product.work = Work(f"products of {role.name}", run, role.products[-1].work if role.products else None)
    role.products.append(product)
    block().work.append(product.work)
    pending = Accumulator(product, acc.layout)
    return pending if is_async else wait_for_products(0, (pending,))


def wait_for_products(most: int = 0, deps: tuple[Value, ...] = ()) -> Value | tuple[Value, ...]:
    """Until at most so many of the role's products are in flight; returns deps, the accumulators among them to be used.

    Each warp waits for its own part of a product: what all of them read is over once they have met.
    """
    role = block().pause()
    number = max(0, len(role.products) - most)
    done, role.products = role.products[:number], role.products[number:]
    for product in done:
        product.work.run()
        for access in product.accesses:
            access.finished = True

    def of(dep: Value) -> Value:
        if not isinstance(dep, Accumulator):
            return dep
        if dep.product in role.products:
            raise Fault(f"{role.line()}: this wait, for all products but {most}, does not cover an accumulator that it returns")
        return Value(dep.product.result, dep.layout)

    results = tuple(map(of, deps))
    return results[0] if len(results) == 1 else results
