"""The suite on `tiled`."""

from suite import AttentionSuite


class TestTiled(AttentionSuite):
    implementation = "tiled"
