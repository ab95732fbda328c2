"""``embodyrl operator``: one page for a person with several arms."""

from __future__ import annotations

import threading

from embodyrl.real_robot.commands.signals import sigterm_is_ctrl_c
from embodyrl.real_robot.commands.tokens import read_token
from embodyrl.real_robot.operator.arms_page import ArmsPage


def serve_arms_page(host: str, port: int, token_file: str) -> None:
    """Serves the page until Ctrl-C; then every arm holds, for its link is lost.

    Args:
        host: address at which arms may connect.
        port: of the page and of the arms; 0 takes a free one.
        token_file: holds the token that arms must send.
    """
    sigterm_is_ctrl_c()
    page = ArmsPage(host, port, read_token(token_file))
    print(f"The page of all arms: {page.address}", flush=True)
    print(
        f"Arms join at ws://{host}:{page.port}/NAME; Ctrl-C ends the page, and they hold.",
        flush=True,
    )
    try:
        threading.Event().wait()
    finally:
        page.close()
