"""How does a step exchange gradients without Python? Machine code beside `reduction` and `comm`, in C."""
