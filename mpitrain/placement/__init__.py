"""Which operation runs where: device functions that spread variables, and a log that shows what became of them."""

from mpitrain.placement.observing import log
from mpitrain.placement.setters import device_setter, variables_on
from mpitrain.placement.spreading import spread
from mpitrain.placement.table import Row, Table

__all__ = ["Row", "Table", "device_setter", "log", "spread", "variables_on"]
