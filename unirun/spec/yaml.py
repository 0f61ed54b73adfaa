"""A job in YAML, with OmegaConf's interpolation and dotted overrides. The only room that imports OmegaConf."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unirun.errors import Fault, SpecError


def load_job_file(path: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The mapping in the file `path` after `overrides` (``roles.actor.count=8``) and interpolation.

    Raises `SpecError` when it cannot be read, is no YAML, or refers to what is not there.
    """
    import yaml
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        config = OmegaConf.load(path)
        if not isinstance(config, DictConfig):
            raise SpecError([Fault(path, "holds a list, expected a mapping with keys like 'roles'")])
        merged = OmegaConf.merge(config, OmegaConf.from_dotlist([*overrides]))
        plain = OmegaConf.to_container(merged, resolve=True)
    except OSError as error:
        raise SpecError([Fault(path, f"cannot be read: {(error.strerror or str(error)).lower()}")]) from error
    except yaml.YAMLError as error:
        raise SpecError([Fault(path, f"is no YAML: {' '.join(str(error).split())}")]) from error
    except UnicodeDecodeError as error:
        raise SpecError([Fault(path, "is no text in UTF-8")]) from error
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        raise SpecError([Fault(path, " ".join(str(error).split()))]) from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}
