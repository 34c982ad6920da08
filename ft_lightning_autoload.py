"""What an installed ft_lightning does for scripts that do not import it: entry point `autoload`.

torch calls the entry points of the group "torch.backends" at the end of its own import. Ours lets
Lightning's registries learn the name "ft_ddp" when (and if) they are imported, so that
`Trainer(strategy="ft_ddp")` needs no import. It imports neither Lightning nor torch.

FT_LIGHTNING_AUTOLOAD=0 switches it off, TORCH_DEVICE_BACKEND_AUTOLOAD=0 all such entry points.
Then `import ft_lightning`, or `python -m ft_lightning script.py`, does the same.

A module of its own and not part of the package: whatever is wrong with an installation, an error
here would be one of `import torch`, for everybody. And the package registers when it is imported,
which is more than a process that has switched this off asks for.
"""

ENV_AUTOLOAD = "FT_LIGHTNING_AUTOLOAD"
OFF = ("0", "false", "off", "no")


def autoload() -> None:
    """Called by torch while it is being imported. Never raises."""
    try:
        import os

        if os.environ.get(ENV_AUTOLOAD, "").lower() not in OFF:
            from ft_lightning.shared.registration import install

            install()
    except Exception as error:
        import sys

        print(f'ft_lightning: strategy="ft_ddp" is not registered: {error!r}', file=sys.stderr)
