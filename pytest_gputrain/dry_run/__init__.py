"""The parent's side of ``--gpu-dry-run``: predictions of cases at full size, without the device.

`runner` asks worker processes for predictions and keeps them in a `cache`; `judge` compares them with those that `store`
holds; `remedies` looks for what makes a case fit; `forecast` tells a real run what is to be expected.
"""
