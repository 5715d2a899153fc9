"""Loaders of data that know no framework, where Horovod has them."""

from mpitrain.horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
