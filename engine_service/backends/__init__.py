"""What computes: one module or package per kind of device, each behind `base.Backend`."""
