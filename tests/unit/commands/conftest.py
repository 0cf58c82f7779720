"""What the sweep's own tests share with those of its command."""

from tests.unit.sweep.conftest import packages as packages
