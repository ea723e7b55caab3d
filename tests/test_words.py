"""The words of a command line as the fields of its Options."""

from dataclasses import dataclass

from ringattn.launch.words import option


@dataclass
class Options:
    sizes: list[int] = option([1, 2], "some sizes")


def test_options_share_no_list():
    Options().sizes.append(3)
    assert Options().sizes == [1, 2]
