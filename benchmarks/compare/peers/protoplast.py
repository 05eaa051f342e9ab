"""PROTOplast: its torch data set over a backed .h5ad file, without the Ray trainer around it."""

from __future__ import annotations

from benchmarks.compare.peers import Epoch, Epochs, Peer, Request, Side, workers_bytes

PEER = Peer(
    requirements=("protoplast",),
    packages=("protoplast", "torch", "anndata", "ray", "numpy"),
    below_python=(3, 13),
    sides={
        "protoplast": Side(
            how="AnnDataModule of DistributedAnnDataset with RandomShuffleStrategy and one worker per core, as its "
            "trainer does it. A minibatch is a run of rows, as torch CSR with int64 indices, without labels. "
            "It leaves out rows at the end of the file, by design, so only the number of rows is bounded.",
            format=".h5ad, uncompressed",
            store=None,
            scenarios=("cold_warm_local", "in_place", "minibatch", "first", "memory"),
            order="runs of cells as long as a minibatch",
            whole=False,
        )
    },
)


def epochs(options: Request) -> Epochs:
    """Epochs of its training loader, whose workers persist."""
    from protoplast.scrna.anndata.strategy import RandomShuffleStrategy
    from protoplast.scrna.anndata.torch_dataloader import AnnDataModule, DistributedAnnDataset

    size, workers = options["batch_size"], options["workers"]
    strategy = RandomShuffleStrategy([options["store"]], size, size, workers, 0.0, 0.0)
    module = AnnDataModule(
        strategy.split(), DistributedAnnDataset, 2, "X", strategy, override_thread=workers, random_seed=1
    )
    module.setup("fit")
    loader = module.train_dataloader()
    return lambda _: Epoch(
        minibatches=iter(loader),
        size=lambda minibatch: minibatch.shape[0],
        values=lambda minibatch: minibatch.values(),
        workers_bytes=workers_bytes,
    )
