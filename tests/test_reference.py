"""The suite on `reference`."""

from suite import AttentionSuite


class TestReference(AttentionSuite):
    implementation = "reference"
    quick_has_more = False
