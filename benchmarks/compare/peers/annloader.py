"""AnnLoader, of anndata.experimental: a torch DataLoader over a backed .h5ad file."""

from __future__ import annotations

from typing import Any

from benchmarks.compare.peers import Epoch, Epochs, Peer, Request, Side

PEER = Peer(
    requirements=("anndata", "torch"),
    packages=("anndata", "torch", "h5py", "numpy"),
    light=True,
    sides={
        "AnnLoader": Side(
            how="AnnLoader(AnnCollection([read_h5ad(backed='r')]), shuffle=True), as anndata's tutorial has "
            "it: its sampler asks for the rows of a minibatch at once. use_default_converter=False keeps X sparse. "
            "No worker processes: with them it cannot collate its own views (TypeError). Minibatches are AnnData "
            "views, not tensors. Deprecated since anndata 0.12.17, which advises annbatch instead.",
            format=".h5ad, uncompressed",
            store=None,
            scenarios=("cold_warm_local", "in_place", "minibatch", "random", "first", "memory"),
            order="single random cells",
        )
    },
)


def epochs(options: Request) -> Epochs:
    """Epochs of random minibatches."""
    import anndata
    from anndata.experimental import AnnCollection, AnnLoader

    backed = anndata.read_h5ad(options["store"], backed="r")
    collection = AnnCollection([backed], join_vars="inner", join_obs="inner", indices_strict=False)
    loader = AnnLoader(collection, batch_size=options["batch_size"], shuffle=True, use_default_converter=False)

    def x(minibatch: Any) -> Any:
        return minibatch.X

    return lambda _: Epoch(
        minibatches=iter(loader),
        size=lambda minibatch: x(minibatch).shape[0],
        values=lambda minibatch: x(minibatch).data,
        labels=lambda minibatch: minibatch.obs[options["obs"]],
    )
