"""What is registered from the beginning: datasets, models and backends. Interfaces come with the algorithms."""

from __future__ import annotations

from unirun.experiments.data import datasets as datasets
from unirun.experiments.models import backends as backends
