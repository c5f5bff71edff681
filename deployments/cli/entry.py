"""The entry point of the `remora` command: importing its modules can be interrupted."""

from __future__ import annotations

from remora.deployments.cli.supervision.early_stop import signals_end_the_process


def main() -> None:
    """Run the command line."""
    with signals_end_the_process():
        from remora.deployments.cli.main import app
    app()


if __name__ == "__main__":
    main()
