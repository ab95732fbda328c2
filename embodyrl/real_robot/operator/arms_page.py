"""One page for a person with several arms: pictures of each, who asks, and the take-over of one.

Arms connect to it (``arm_link``), from this machine or with a token from others. The page itself is
shown on this machine alone, like that of one arm. A person moves one arm at a time, the others go
on. Arms that ask hold still, and wait in the order in which they asked. A stop is for all arms.

Nothing here touches a robot: every arm obeys its own safety filter, and holds when its link is lost.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from http import HTTPStatus
from pathlib import Path
from typing import Any

from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection

from embodyrl.errors import UserError
from embodyrl.real_robot.arm_names import check_name
from embodyrl.real_robot.control.operator import WISHES
from embodyrl.real_robot.operator.arm_state import ArmState, check_status
from embodyrl.real_robot.operator.page import BEAT, MAX_MESSAGE, PAGE_HEADERS, Keys, read_page
from embodyrl.real_robot.parsing import MessageError, number, parse_json, text
from embodyrl.real_robot.ports import is_loopback, listen, peer, same_secret

PORT = 8002
MAX_ARMS = 16
MAX_CAMERAS = 8
MAX_ARM_MESSAGE = 2**20
"""Bytes of an arm's message: a status, or one image."""
JPEG = b"\xff\xd8\xff"
"""How an image begins."""
SILENT = 1.2
"""s without a word of an arm after which its link counts as lost."""
PERIOD = 0.1
"""s between two updates of the page."""
TAKES = ("takeover", "rewind")
"""Wishes after which the person moves the arm."""


class ArmsPage:
    """Serves the page, and the arms that connect to it, until ``close``.

    Args:
        host: address at which arms may connect; the page is on this machine alone.
        port: 0 takes a free one.
        token: what arms must know; needed wherever others can reach the address.

    Raises:
        UserError: the address may not be used, or the port is in use.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = PORT, token: str = "") -> None:
        self._secret = secrets.token_urlsafe(24)
        self._html = read_page(Path(__file__).with_name("arms.html"))
        self._news = threading.Condition()
        self._arms: dict[str, ArmState] = {}
        self._closed = False
        self._server = listen(
            self._talk,
            host,
            port,
            what="The page of several arms",
            token=token,
            pages=self._answer,
            without_token=("/socket",),
            max_bytes=MAX_ARM_MESSAGE,
        )
        self.port = int(self._server.socket.getsockname()[1])
        self.address = f"http://127.0.0.1:{self.port}/#{self._secret}"
        threading.Thread(target=self._server.serve_forever, name="arms", daemon=True).start()

    def close(self) -> None:
        """Ends the server; the arms hold."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        self._server.shutdown()

    def queue(self) -> list[str]:
        """The arms that ask for a person, the one that waits longest first."""
        with self._news:
            asking = [arm for arm in self._arms.values() if arm.asks]
        return [arm.name for arm in sorted(asking, key=lambda arm: arm.since)]

    # ---- Who comes in.

    def _answer(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answers a request with the page, or with None to open a websocket."""
        local = is_loopback(str(connection.remote_address[0]))
        from_page = "Origin" in request.headers  # ``ports`` has compared it with this port
        if request.path in ("/", "/socket") and not local:
            why = "The page is for this machine alone. Use a tunnel: ssh -L\n"
            return connection.respond(HTTPStatus.FORBIDDEN, why)
        if request.path == "/socket":
            return (
                None if from_page else connection.respond(HTTPStatus.FORBIDDEN, "Not from there.\n")
            )
        if request.path == "/":
            return Response(HTTPStatus.OK, "OK", Headers(PAGE_HEADERS), self._html)
        # Everything else is the name of an arm, and no browser is one.
        if from_page:
            return connection.respond(HTTPStatus.FORBIDDEN, "Not from there.\n")
        return None

    def _talk(self, connection: ServerConnection) -> None:
        path = connection.request.path if connection.request is not None else ""
        try:
            if path == "/socket":
                self._talk_page(connection)
            else:
                self._talk_arm(connection, path.strip("/"))
        except (ConnectionClosed, TimeoutError):
            pass
        except UserError as error:  # a MessageError is one
            connection.close(4002, str(error)[:100])

    # ---- The arms.

    def _talk_arm(self, connection: ServerConnection, name: str) -> None:
        """Listens to an arm until its link ends."""
        arm = self._join(connection, check_name(name))
        clean = False
        try:
            self._tell(arm, {})  # it is taken
            # A stop that it could not hear comes first.
            if arm.stop:
                arm.stop = False
                self._tell(arm, {"do": "estop"})
            beat = threading.Thread(target=self._beat, args=(arm, connection), daemon=True)
            beat.start()
            # A status names its cameras, and their images follow.
            waiting: list[str] = []
            images: dict[str, bytes] = {}
            while True:
                data = connection.recv(timeout=SILENT)
                if isinstance(data, bytes):
                    images |= self._image(data, waiting)
                    if not waiting:
                        self._show(arm, images)
                    continue
                waiting = self._hear_arm(arm, parse_json(data, MAX_ARM_MESSAGE))
                images = {}
        except ConnectionClosed as error:
            clean = error.rcvd is not None and error.rcvd.code == 1000
        finally:
            self._leave(arm, clean)

    def _join(self, connection: ServerConnection, name: str) -> ArmState:
        """Lets an arm in.

        Raises:
            UserError: another arm has its name, or there are too many.
        """
        with self._news:
            arm = self._arms.get(name)
            if arm is not None and arm.connection is not None:
                raise UserError(f"there is an arm {name} at {peer(arm.connection)} already")
            if arm is None:
                if len(self._arms) >= MAX_ARMS:
                    raise UserError(f"there are {MAX_ARMS} arms already")
                arm = self._arms[name] = ArmState(name)
            arm.connection = connection
            arm.stamp = 0.0
            arm.shown_at = time.monotonic()
            arm.note_asks("", arm.shown_at)
            return arm

    def _leave(self, arm: ArmState, clean: bool) -> None:
        """Notes that a link has ended. An arm that did not say goodbye stays on the page, as lost."""
        with self._news:
            if clean:
                self._arms.pop(arm.name, None)
            arm.connection = None
            arm.note_asks("", 0.0)
            arm.note_asks("there is no link to this arm; it holds by itself", time.monotonic())
            self._news.notify_all()

    def _hear_arm(self, arm: ArmState, message: dict[str, Any]) -> list[str]:
        """Takes in a status, or a beat.

        Returns:
            The names of the cameras whose images follow.

        Raises:
            MessageError: it is neither.
        """
        arm.stamp = number(message.get("stamp"), -1e12, 1e12, "stamp")
        if "status" not in message:
            return []
        status = message["status"]
        cameras = message.get("cameras")
        if not isinstance(status, dict) or not isinstance(cameras, list):
            raise MessageError("an arm's message has no status or no cameras")
        if len(cameras) > MAX_CAMERAS:
            raise MessageError(f"an arm shows more than {MAX_CAMERAS} cameras")
        checked = check_status(status)
        names = [text(camera, "a camera's name", 64) for camera in cameras]
        with self._news:
            arm.status = checked
            arm.shown_at = time.monotonic()
            arm.note_asks(checked["asks"], arm.shown_at)
            self._news.notify_all()
        return names

    def _image(self, data: bytes, waiting: list[str]) -> dict[str, bytes]:
        """The image of the next camera.

        Raises:
            MessageError: none is expected, or it is no JPEG.
        """
        if not waiting or not data.startswith(JPEG):
            raise MessageError("an arm sent what is no image, or one that was not announced")
        return {waiting.pop(0): data}

    def _show(self, arm: ArmState, images: dict[str, bytes]) -> None:
        with self._news:
            arm.images = images
            arm.version += 1
            self._news.notify_all()

    def _beat(self, arm: ArmState, connection: ServerConnection) -> None:
        """Says to an arm four times a second that the page is there."""
        while arm.connection is connection and not self._closed:
            self._tell(arm, {})
            time.sleep(BEAT)

    def _tell(self, arm: ArmState, message: dict[str, Any]) -> bool:
        """Sends to an arm, with the stamp of what it said last; returns whether it could."""
        connection = arm.connection
        if connection is None:
            return False
        try:
            connection.send(json.dumps({**message, "stamp": arm.stamp}))
        except ConnectionClosed:
            return False
        return True

    # ---- The page.

    def _talk_page(self, connection: ServerConnection) -> None:
        """Listens to one page, once it has sent the token."""
        given = connection.recv(timeout=5.0)
        if not isinstance(given, str) or not same_secret(given, self._secret):
            connection.close(4001, "wrong token")
            return
        threading.Thread(
            target=self._send, args=(connection,), name="arms page", daemon=True
        ).start()
        moves = ""  # the arm that this page's person has taken over
        while True:
            moves = self._hear_page(parse_json(connection.recv(), MAX_MESSAGE), moves)

    def _hear_page(self, message: dict[str, Any], moves: str) -> str:
        """Passes on a wish, or the keys that are held, to the arm that they are for.

        Args:
            message: of a page.
            moves: the arm that its person has taken over; empty for none.

        Returns:
            The arm that they have taken over now.

        Raises:
            MessageError: it is neither.
        """
        wish = message.get("do")
        # A stop is for all arms.
        if wish == "estop":
            with self._news:
                arms = list(self._arms.values())
            for arm in arms:
                # One that cannot hear it is told as soon as it can.
                arm.stop = not self._tell(arm, {"do": "estop"})
            return ""
        name = text(message.get("arm"), "arm", 32)
        with self._news:
            arm = self._arms.get(name)
            before = self._arms.get(moves)
        # Keys are for the chosen arm.
        if wish is None:
            Keys.of(message, 0.0)
            keys = {"keys": message["keys"], "open": message.get("open") is True}
            if arm is not None:
                self._tell(arm, keys)
            return moves
        if wish not in WISHES:
            raise MessageError("the page asked for what it cannot ask for")
        if arm is None:
            return moves
        # A person moves one arm at a time: the other one is held, and then asks.
        if wish in TAKES and before is not None and before is not arm:
            self._tell(before, {"do": "hold"})
        self._tell(arm, {"do": wish})
        if wish in TAKES:
            return name
        return "" if moves == name else moves

    def _send(self, connection: ServerConnection) -> None:
        """Sends to one page what all arms show, ten times a second at most."""
        versions: dict[str, int] = {}
        try:
            while not self._closed:
                now = time.monotonic()
                with self._news:
                    arms = sorted(self._arms.values(), key=lambda arm: arm.name)
                    rows = [arm.row(now) for arm in arms]
                    images: list[tuple[str, bytes]] = []
                    # Images that this page has not been sent yet.
                    for arm in arms:
                        if versions.get(arm.name) != arm.version:
                            versions[arm.name] = arm.version
                            images += [(f"{arm.name}/{c}", x) for c, x in arm.images.items()]
                status = {"arms": rows, "cameras": [name for name, _ in images]}
                connection.send(json.dumps({"age": 0.0, "status": status}))
                for _, image in images:
                    connection.send(image)
                time.sleep(PERIOD)
        except ConnectionClosed:
            pass
