#!/bin/sh
# Makes the line of nginx's map from the secret; the key is in no configuration and no environment.
set -eu
secret="${ACCESS_KEY_FILE:-/run/secrets/access_key}"
target="${ACCESS_KEY_MAP:-/tmp/access-key.conf}"
key="$(tr -d '\r\n' < "$secret")"
case "$key" in
    *[!A-Za-z0-9_.~+/-]* | "")
        echo "$secret must hold 16 to 256 of letters, digits and _.~+/-" >&2
        exit 1
        ;;
esac
umask 077
printf '"%s" 1;\n' "$key" > "$target"
