"""Django's settings, as far as a worker needs them."""

from __future__ import annotations

import os

from psycopg.conninfo import conninfo_to_dict

_given = conninfo_to_dict(os.environ["EXACTLY_ONCE_CONNINFO"])

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _given["dbname"],
        "USER": _given.get("user", ""),
        "PASSWORD": _given.get("password", ""),
        "HOST": _given.get("host", ""),
        "PORT": _given.get("port", ""),
        "OPTIONS": {"connect_timeout": 10},
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["votes"]
USE_TZ = True
