"""Loaders of data: a class of batches, and one that makes them ahead in a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

WAIT_SECONDS = 0.1


class BaseDataLoader:
    """What gives batches; a class of the script's own says which."""

    def __len__(self) -> int:
        """Local: how many batches there are."""
        raise NotImplementedError

    def _iterate(self) -> Iterator[Any]:
        """Local: the batches."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """Local: what is done with each batch where it is used."""
        return batch


class AsyncDataLoaderMixin:
    """Makes batches ahead: to stand first among the bases, as in `class Loader(AsyncDataLoaderMixin, OwnLoader)`.

    What the making of a batch raises, the loop over the batches raises. `async_loader_queue_size` batches are made
    ahead; with 0 none are.
    """

    def __init__(self, async_loader_queue_size: int = 64, *args: Any, **kwargs: Any) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        super().__init__(*args, **kwargs)
        self._stop, self._thread = threading.Event(), threading.Thread()

    def __iter__(self) -> Iterator[Any]:
        loader: Any = self
        if self.async_loader_queue_size <= 0:
            yield from super().__iter__()  # type: ignore[misc]
            return
        self.close_async_loader()
        ahead: queue.Queue[tuple[str, Any]] = queue.Queue(self.async_loader_queue_size)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=_make, args=(loader, ahead, self._stop), name="batches", daemon=True)
        self._thread.start()
        while True:
            what, item = ahead.get()
            if what == "error":
                raise item
            if what == "end":
                return
            yield loader._process_batch(item)

    def close_async_loader(self) -> None:
        """Local: make no more batches, and wait for the thread that made them."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()


def _make(loader: Any, ahead: queue.Queue[tuple[str, Any]], stop: threading.Event) -> None:
    """Local: the batches, then the end; until told to stop."""

    def put(what: str, item: Any) -> bool:
        while not stop.is_set():
            try:
                # Not for ever: whoever took the batches may have stopped in mid-epoch.
                ahead.put((what, item), timeout=WAIT_SECONDS)
            except queue.Full:
                continue
            return True
        return False

    try:
        for batch in loader._iterate():
            if not put("batch", batch):
                return
        put("end", None)
    except Exception as error:  # of the script's own code
        put("error", error)
